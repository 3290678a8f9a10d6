"""The folder of a run: its configuration, record and checkpoints; resuming and interruptions."""
