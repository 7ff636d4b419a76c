"""What every framework's module shares: lifecycle, process sets, operators, objects, compression."""
