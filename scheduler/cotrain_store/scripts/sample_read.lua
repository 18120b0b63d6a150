-- sample_read: clients hold these results: they need not be kept as long. Changes nothing else.
local ttl_ms, extra_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local FIRST = 3 -- then the requests

for i = FIRST, #ARGV do
  local sample, result = 'cotrain:sample:' .. ARGV[i], 'cotrain:result:' .. ARGV[i]
  if redis.call('EXISTS', result) == 1 then -- so its request is done
    end_sooner(result, ttl_ms)
    end_sooner(sample, ttl_ms + extra_ms)
  end
end
return 'OK'
