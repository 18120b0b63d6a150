-- tenant_limits: set some of a tenant's own limits (`numbers`, as text: they are exact) and take others `back` to their
-- defaults. Twice is harmless.
local limits = KEYS[1]
local args = cjson.decode(ARGV[1])

for quota, number in pairs(args.numbers) do
  redis.call('HSET', limits, quota, number)
end
for _, quota in ipairs(args.back) do
  redis.call('HDEL', limits, quota)
end
return 'OK'
