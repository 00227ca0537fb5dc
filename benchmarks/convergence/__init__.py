"""Which rule learns how fast, per step, per second and per byte: a study of many trainings, and what is concluded from its rows."""
