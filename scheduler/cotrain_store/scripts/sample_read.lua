-- sample_read: clients hold these results: they need not be kept as long. Changes nothing else.
local ttl_ms, extra_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local FIRST = 3 -- then the requests

for i = FIRST, #ARGV do
  local sample, result = 'cotrain:sample:' .. ARGV[i], 'cotrain:result:' .. ARGV[i]
  if redis.call('PTTL', result) > ttl_ms then -- so it is there, and its request is done
    redis.call('PEXPIRE', result, ttl_ms)
    redis.call('PEXPIRE', sample, ttl_ms + extra_ms)
  end
end
return 'OK'
