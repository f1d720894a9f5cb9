"""The program, from its first line."""

import signal


def program() -> int:
    """Run it. SIGTERM, what mpirun sends in its place, and Ctrl-C wait from here on until whoever answers listens."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
    from meshwright.cli.main import main  # takes many times as long as all before

    return main()


if __name__ == "__main__":
    raise SystemExit(program())
