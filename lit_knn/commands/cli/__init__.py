"""The command line of fit, validate, predict, plan and best: options, config files, messages."""
