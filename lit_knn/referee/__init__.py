"""The referee: one benchmark of posterior-mean estimators, ours and other people's."""
