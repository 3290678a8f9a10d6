"""The paper as pure functions: the noise, the posterior, proposals, SNIS and its bounds."""
