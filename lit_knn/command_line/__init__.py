"""The command line: checks of config files, values and the trainer's options; the one line that tells an error."""
