"""What people see: tables, lines, a live table, JSON."""
