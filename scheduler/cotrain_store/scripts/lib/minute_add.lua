-- minute_add: add to the counts of a pool's minute.
local function add_minute(minute, counts, ttl_s)
  for name, value in pairs(counts) do
    redis.call('HINCRBYFLOAT', minute, name, value)
  end
  redis.call('EXPIRE', minute, ttl_s)
end
