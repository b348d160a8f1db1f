"""The commands of the command line, one file each with `Options` and `run`.

`run(options)` returns the result for --json and the text to print.
"""
