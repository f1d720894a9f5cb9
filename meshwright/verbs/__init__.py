"""What a user can ask for, one verb a file. Each says its own words, and imports what is heavy only when it runs."""
