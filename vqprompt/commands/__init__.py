"""The command line. Only `app` is imported at start; each command imports torch and the rest when it is called."""
