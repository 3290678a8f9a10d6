"""Checks of the command line: config files, values, options of the trainer; and the one line that tells an error."""
