"""What the training loop and the RL loop share: metrics, checkpoints, signals, files, energy."""
