"""The torch optimizer under every rule: what a step does is planned once, and then walked. It knows no rule."""
