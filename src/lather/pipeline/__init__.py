"""Pipeline parallelism: layers to stages, the table of what a rank does when, and what walks it."""
