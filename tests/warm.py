"""Compiles the kernels of the scheduler where tests and their jobs find them: `python -m tests.warm`."""

import os

from dflop.launch.kernels import kernel_environment


def main() -> None:
    os.environ |= kernel_environment(os.environ)
    from dflop.schedule.step_scheduler import warm  # numba reads the variable when it is imported

    warm()


if __name__ == "__main__":
    main()
