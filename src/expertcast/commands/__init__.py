"""The commands of the command line, one file each: `Options`, what it takes, and `run`, which does it.

`run(options)` returns the result for --json and the text to print.
"""
