"""Lightning callbacks of the application."""
