"""From events to aligned rounds and steps: clocks, matching, and the excess of each rank over its peers."""
