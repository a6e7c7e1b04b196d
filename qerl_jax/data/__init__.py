"""Problems in, prompts and answers out, in an order that a cursor alone resumes."""

ROW_FILES = (".jsonl", ".ndjson")  # suffixes of files of one JSON object a line
