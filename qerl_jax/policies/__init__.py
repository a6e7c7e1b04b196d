"""The policy that ships with the library, and the script that trained it."""
