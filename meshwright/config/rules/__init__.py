"""Every rule between fields of a run, a file for each subject; `config/check.py` asks them all."""
