"""The commands of the command line, one file a subject. Each checks its flags, calls the library and prints."""
