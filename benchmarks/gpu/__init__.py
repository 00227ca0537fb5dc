"""Measures everything that has to be measured on a GPU: `make gpu`, or `python -m benchmarks.gpu`.

    needs      the packages that have to be installed, checked before anything starts
    parts      the parts and their time limits
    runner     runs each part in a process of its own, and no part twice
    work       the work of a part, in that process: kernels, refresh, optimizer, block, training
    summary    the table and the rows of all parts together

On the CPU (`--device cpu --small`) every part runs at tiny sizes, so that nothing but the hardware
is new when it runs on a GPU."""
