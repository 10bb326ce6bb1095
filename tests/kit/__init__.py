"""What tests are made of, each once: models and their data, references in one process, plans, pools, programs, waits.

What serves one folder alone lies in that folder.
"""
