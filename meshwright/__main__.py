"""The program, from its first line."""

import signal


def program() -> int:
    """Run it. SIGTERM waits from here on until whoever has an answer to it listens."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    from meshwright.cli.main import main  # takes many times as long as all before

    return main()


if __name__ == "__main__":
    raise SystemExit(program())
