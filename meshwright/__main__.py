"""The program, from its first line."""

import signal


def program() -> int:
    """Run it. SIGTERM, and what mpirun sends in its place, wait from here on until whoever has an answer listens."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
    from meshwright.cli.main import main  # takes many times as long as all before

    return main()


if __name__ == "__main__":
    raise SystemExit(program())
