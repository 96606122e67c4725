"""From kernel records to rows of the trace, with lost records counted."""
