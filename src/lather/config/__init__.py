"""The configuration of a run: its sections, their TOML file, and the fields that a run may
change."""
