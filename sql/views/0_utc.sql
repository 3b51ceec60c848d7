-- Records keep seconds since the epoch; views give TIMESTAMPs in UTC, which look the same in every client whatever its
-- time zone. A number that is no time of the years 1 to 9999 gives null: an error would keep everybody from the view.
create or replace macro utc(num_seconds) as
case
    when num_seconds between -62135596800 and 253402300799
        then make_timestamp(try_cast(num_seconds * 1000000 as bigint))
end;

comment on macro utc is -- noqa: PRS
'Seconds since the epoch as a TIMESTAMP in UTC; null where they are no time of the years 1 to 9999.';
