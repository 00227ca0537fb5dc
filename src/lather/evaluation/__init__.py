"""How well a trained model predicts: held-out sets, per token and per byte, and the tasks of lm-evaluation-harness. In one process."""
