"""What goes out of the house: traces for other tools' viewers, tables for other tools' readers."""
