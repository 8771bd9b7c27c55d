"""Keeps the garbage collector from looking at the program itself again and again.

A full collection looks at each object that can hold others, and most of a process's are its modules
and classes, which live as long as it: 30 ms of processor time in each of our programs, during which
no message is heard. What stands when a program begins its work is left out of them.
"""

import gc


def leave_program_out() -> None:
    """Leave all that stands now out of later collections: once, when imports are done."""
    gc.collect()
    gc.freeze()
