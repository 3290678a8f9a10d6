"""Bad command lines: each ends in one line and exit status 2, without a traceback, and writes nothing."""
