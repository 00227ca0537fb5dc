"""How ranks are laid out, started and kept together."""
