"""The folder of a run, with its configuration, record and checkpoints; how runs are resumed and interrupted."""
