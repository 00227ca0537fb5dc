"""Text generation: encodes prompts and conversations to tokens, and decodes the model's tokens to
text as they are generated."""
