"""The command line of fit, validate, predict, plan, probe and best: options, config files, messages."""
