"""The command line: one verb a file, imported when it is used."""
