"""Pipeline parallelism: the partition of layers into stages, the schedule of each rank, and its
execution."""
