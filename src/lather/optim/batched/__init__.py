"""The torch optimizer for every rule: it plans once what a step does, and every step executes the
plan. It knows no rule."""
