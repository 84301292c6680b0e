"""Student's distribution, for checking intervals. Imports nothing of the package."""

# Two-sided 95 % points as printed in tables of the distribution.
PRINTED_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042}
