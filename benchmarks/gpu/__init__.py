"""Everything that has to be measured on a GPU, by one command: `make gpu`, or `python -m benchmarks.gpu`.

    needs      what has to be installed, checked before anything starts
    parts      what is done, in which time
    runner     each part in a process of its own; what is done is not done again
    work       one part, in that process: kernels, refresh, optimizer, block, training
    summary    the table, the picture and the rows of all parts together

On the CPU (`--device cpu --small`) every part runs at tiny sizes, so that on the day a GPU is there only the hardware is new.
"""
