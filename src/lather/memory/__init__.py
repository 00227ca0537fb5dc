"""The memory of activations: tensors saved for backward, and peaks of pipeline ranks."""
