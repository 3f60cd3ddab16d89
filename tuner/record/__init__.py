"""What a study is: its folder and the record in it."""
