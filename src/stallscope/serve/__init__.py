"""What people, programs and assistants ask: the same answers over every way of asking."""
