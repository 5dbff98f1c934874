"""The commands, one file a subject. Each checks its flags, calls the library and prints what that gives."""
