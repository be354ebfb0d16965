"""The command line: one module per verb (`train`, `plan`, ...), imported only when it is used."""
