"""Networks published as files: their configurations, and a reader of their pickles that runs nothing."""
