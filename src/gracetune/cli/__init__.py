"""The command line: one file a verb, each loaded only when it is called."""
