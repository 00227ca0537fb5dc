"""Text from a decoder: prompts and conversations to tokens, and tokens to text as they come."""
