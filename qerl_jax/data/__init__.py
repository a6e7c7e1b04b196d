"""Problems in, prompts and answers out, in an order that a cursor alone resumes."""
